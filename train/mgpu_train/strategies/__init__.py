"""How a model is spread over ranks: the contract of a strategy, and the strategies of the bundled trainer."""
