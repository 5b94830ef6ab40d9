"""Models of where work should go: which instance in which slot and stage, which path for which demand.

Pure numpy. They weigh alternatives that are there now; what will be is the business of the forecasts beside
this package.

- `stage_balance`: which instance should change its stage, by a formula.
- `change_graphs`, `outcome_network`: which instance should leave its slot or stage, by a trained one
  of graphs.
- `path_split`, `path_scoring`: demands over paths, by gradients and by a trained graph network.
- `weights/`: what the two networks learnt.
"""
