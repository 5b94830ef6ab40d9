"""From an analysed model to a placed task graph (draft §4.4(1), §4.5). Pure: no I/O, no clock.

It decides where the model is cut into stages, which slot each unit gets, the first route weights and windows,
and which units a change of the number of replicas adds or removes. `job.job_run` plans a job; `membership`
places replacements and changes. Nothing here starts an instance.

task_graph.py    `graph_for`: units, edges, constraints, placements of a plan; `first_policy`
plan_requests.py what the planner (`entities.planner`) is asked for a job
plan_rules.py    what a job's section `plan` says, as rules of the planner
task_heads.py    units by business: the trunk, and each task head
kept_apart.py    the same rules for whatever instances the job gets later
plan_question.py what somebody asks before there is a job, and what is told
shape_choice.py  stages and replicas that a job leaves to the planner
eligible_slots.py the slots that a job may use, by what their nodes registered
segmentation.py  where a model may be cut; `segment`: its cut without a mesh
placement.py     `place`: a slot for each unit, or why there is none; `open_room`: what is free
scaling.py       units added or removed with the number of replicas; weights of standbys
change_account.py `ChangeAccount`: which change of a job is allowed, and whether it was worth it
window_room.py   how large a stage's window may become
"""
