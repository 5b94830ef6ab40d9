"""What functional modules say about a fault at hand (ADR-0099): asked with a deadline, ranked, bounded.

The leader asks on behalf of a job (`recovery.fault_choices`), which carries the ruling out and measures it.
Nothing here gives an instance up or starts one.

fault_questions.py  `FaultQuestions`: one question to all modules, their answers, and what each is told
fault_rules.py      whose way is gone, and its bounds; pure
"""
