"""The event-driven simulator: a placement under load, with the router and admission of the runtime."""
