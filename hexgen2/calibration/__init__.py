"""Numbers of operators from measured times: reading tables, fitting, errors."""
