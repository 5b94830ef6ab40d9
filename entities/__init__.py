"""The draft's entities, one service each. They import the bus and the schemas, never each other."""
