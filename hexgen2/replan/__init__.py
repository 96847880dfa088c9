"""Re-planning: from the running placement to a better one, with the cost of the moves weighed in."""
