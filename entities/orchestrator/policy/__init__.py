"""Functional modules at the orchestrator: what they suggest, how reliable they are, which version is active.

The leader hands suggestions, lifecycles and orders to `PolicyService`, and promotions to `PromotionService`.
The rules are pure: `arbitrate` adopts or declines a suggestion and says why (draft §4.2, §5.2), `verdict`
says when a promoted version has to give way (ADR-0021). Adopted weights become a `CommunicationPolicy`; other
actions are passed on to the job (`membership.job_actions`), which may still decline. A module never changes
anything itself.

policy_service.py     `PolicyService`: suggestions, lifecycles and orders of modules
arbitration.py        `arbitrate`, `lapse`: adopt or decline, and the end of a validity; pure
arbitration_state.py  `ArbitrationState`: what was adopted and is in force; pure
automation_service.py `AutomationService`: off, advise or act, switched live (ADR-0092)
job_facts.py          `job_facts`: what arbitration has to know of a running job
knobs.py              who holds which knob of a job, and who may take it over; pure
learnt_state_service.py `LearntStateService`: what modules have learnt, kept by compare-and-set (ADR-0100)
personal_pins.py      what persons have set, in jobs' records, so that it outlives this orchestrator
suggestion_rules.py   `nonsense_in`: whether a suggestion makes sense for its job; pure
module_reputation.py  `ModuleReputation`: rate, strikes and suspension of a module; pure
reputation_store.py   `ReputationStore`: reputations in the bucket `standings`, over a change of orchestrators
promotion_service.py  `PromotionService`: promotes versions and rolls them back
promotion_rules.py    which version is active, and whether it stays; pure
faults_at_hand/       what modules say about a fault at hand (ADR-0099)
"""
