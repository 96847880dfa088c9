"""Starting a placement's workers and stopping them: one interface, one module per way to do it."""
