"""hexgen2 with prices: what to rent and how to place it, jointly.

The search runs over the universe of all nodes and offers, where a solution over the budget is no
candidate (search/budget.py). Its starts are the plain search on the richest rental of each GPU type
alone, and the linear program over all types and each type.
"""
