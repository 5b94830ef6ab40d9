"""The accountant: what each device was used for, by whom, and what that costs (docs/accounts.md, ADR-0125).

It decides how reports of nodes and claims of instances become amounts in slices of a quarter of an hour, what
a statement says of them, and when a budget is used up. Nodes, instances and gateways tell it by streams;
gateways ask it for statements; the orchestrator holds jobs whose budget is used up. It never ends a job, sets
no price, and keeps nothing but what it writes: any number of accountants may run, and a restart counts
nothing twice.

- `ledger`: reports and claims in, charges out; pure
- `service_use`: who was answered by versions of services, and whose their work is; pure
- `payers`: whose jobs and rows are; pure
- `statement`: slices and prices in, lines out; pure
- `budget_book`: whether budgets are used up; pure
- `account_book`: how charges get into slices, once each
- `service`: follows the streams, answers questions
"""

from entities.accountant.service import Accountant, AccountantConfig

__all__ = ["Accountant", "AccountantConfig"]
