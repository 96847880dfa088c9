"""What a placement is promised to do, by simulation: finalists of a search, and their goodput."""
