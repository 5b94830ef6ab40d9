"""What a node tells the accountant: who held which of its slots, and until when (ADR-0125).

`slot_meter` decides what a report says, `slot_reports` sends it. The agent calls both; they decide about no
instance, and a report that is not heard changes nothing.
"""
