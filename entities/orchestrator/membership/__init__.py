"""Members of a job's stages: lost, replaced, joining, moved, scaled (DESIGN §5 rules 9 and 10).

It decides which incarnation takes a lost one's place and when it joins, how replicas and standbys change,
which side of a network partition is kept (`partition`, pure), and when trying again makes no sense
(`failure_handling`). A job's training calls it. It never commits a step: joining and leaving are events of
the step machine.
"""
