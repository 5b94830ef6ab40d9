"""Whether a new version does worse than the one beside it, with a stated rate of false alarms (ADR-0134).
Pure numpy.

It decides when the evidence suffices, at whatever moment somebody looks; what follows is the caller's. The
module `canary-judge` calls it. It never knows a service, a clock or the bus.

- `permutation_test`: bets on who among simultaneous requests has the worse outcome; exact, whatever the
  outcomes' law.
- `version_judge`: a stable version and a candidate by failures, latencies and quality, request by request.
"""
