"""What devices were used for: reports of nodes, the accounts, statements and budgets (docs/accounts.md)."""

from __future__ import annotations

from bus.subject_row import Subject
from bus.subjects.table import ACCOUNTANT, MG, MIC, RECORDS_BYTES, SMO
from schemas import accounts

__all__ = [
    "ACCOUNT_POSITION",
    "ACCOUNT_QUERY",
    "ACCOUNT_SLICE",
    "BUDGET_STATE",
    "SLOT_REPORT",
    "USE_REPORT",
]

SLOT_REPORT = Subject(
    "slot report",
    "account.slots.{agent}",
    accounts.SlotReport,
    MIC,
    ACCOUNTANT,
    "who held which slot of a node, and until when; every few seconds, and when that changes",
    stream="ACCOUNTS",
)
USE_REPORT = Subject(
    "use report",
    "account.use.{gateway}",
    accounts.UseReport,
    MG,
    ACCOUNTANT,
    "how many tokens each user was given by versions of services; every few seconds while that changes",
    stream="ACCOUNTS",
)
ACCOUNT_SLICE = Subject(
    "account slice",
    "{start}",
    accounts.AccountSlice,
    ACCOUNTANT,
    ACCOUNTANT,
    "what was used in a quarter of an hour, by whom; by compare-and-set",
    bucket="accounts",
)
ACCOUNT_POSITION = Subject(
    "account position",
    "{part}.{name}",
    accounts.AccountPosition,
    ACCOUNTANT,
    ACCOUNTANT,
    "how far the streams, a node's reports or a job's claims are counted; by compare-and-set",
    bucket="account_positions",
)
ACCOUNT_QUERY = Subject(
    "account query",
    "account.query",
    accounts.AccountQuery,
    MG,
    ACCOUNTANT,
    "what was used, by whom, and what it costs (queue group)",
    reply=accounts.AccountStatement,
    answer_bytes=RECORDS_BYTES,
)
BUDGET_STATE = Subject(
    "budget state",
    "{budget}",
    accounts.BudgetState,
    ACCOUNTANT,
    SMO,
    "how much of a budget is used; one that is used up may hold jobs",
    bucket="budgets",
)
