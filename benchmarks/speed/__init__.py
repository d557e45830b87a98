"""How fast the task lock is and what it costs, beside bare psycopg and other libraries."""
