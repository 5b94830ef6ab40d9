"""Backflow: what is kept of requests whose service and whose user both say so, to be trained on.

Called by `generation/operations.py` (an answer is whole) and by the HTTP routes below `http/routes/backflow`.
It decides whether a request may be kept, takes personal data out before it is stored, forgets at the end date
and on demand, and makes files of what is kept. It never keeps a request on one side's word, never stores a
name of a person, and trains nothing (docs/backflow.md, ADR-0164 to 0166).

consent_rules.py  pure: whether a request may be kept
plain_form.py     pure: a text as patterns read it
redaction.py      pure: personal data and secrets out of texts
number_shapes.py  pure: … cards, IBANs, phones, long numbers
pseudonyms.py     who a person is, for whoever has the key
consents.py       what users have said
kept_items.py     the items: stored, counted, erased
collection_rules.py  pure: which items a file gets, and the file's lines
collections.py    the files that jobs train on
request_keeping.py   from a whole answer to an item
learnt_from.py    pure: which jobs, models and versions have learnt from a file
operations.py     what the HTTP routes call
"""
