"""Functions and operators that a role can create in the schema public beside PostgreSQL's own.

PostgreSQL looks into `pg_catalog` first, but prefers the function that fits the arguments' types
best, wherever it is in the `search_path` (CVE-2018-1058). A statement whose operands need no
conversion is safe.
"""

from __future__ import annotations

from typing import Any

import psycopg

# The error of each of these functions.
CALLED = "called what somebody has put into the schema public"

_TYPES = """
    int2 int4 int8 float8 numeric text varchar name bool uuid timestamptz timestamp date interval
    json jsonb text[] oid oid[] regclass
"""
_OPERATORS = """
    + - * / < > <= >= = <> || @> <@ && ->> -> ~~ ~ !~ ?
"""
_FUNCTIONS = """
    array_agg array_append array_length array_position array_remove array_to_string bool_and
    bool_or cardinality ceil concat count current_setting date_part date_trunc extract floor
    format gen_random_uuid has_schema_privilege has_table_privilege json_to_recordset
    json_array_elements json_array_elements_text jsonb_array_elements jsonb_build_object
    jsonb_typeof left length lower make_interval max min mod now nullif num_nonnulls
    pg_advisory_xact_lock pg_blocking_pids pg_get_userbyid pg_notify pg_table_is_visible pg_sleep
    quote_ident random replace right round row_security_active set_config split_part starts_with
    string_agg string_to_array substr substring sum to_char to_json to_jsonb to_regclass
    to_timestamp unnest upper clock_timestamp
"""

_CREATE = """
DO $do$
DECLARE
    types text[] := string_to_array({types}, ' ');
    one text;
    other text;
    name text;
BEGIN
    FOREACH one IN ARRAY types LOOP
        FOREACH other IN ARRAY types LOOP
            EXECUTE format('CREATE FUNCTION public.%I(%s, %s) RETURNS bool LANGUAGE plpgsql AS '
                           '$$BEGIN RAISE EXCEPTION {called}; END$$', one || other, one, other);
            FOREACH name IN ARRAY string_to_array({operators}, ' ') LOOP
                EXECUTE format('CREATE OPERATOR public.%s (LEFTARG = %s, RIGHTARG = %s, '
                               'FUNCTION = public.%I)', name, one, other, one || other);
            END LOOP;
        END LOOP;
        FOREACH name IN ARRAY string_to_array({functions}, ' ') LOOP
            EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS bool LANGUAGE plpgsql AS '
                           '$$BEGIN RAISE EXCEPTION {called}; END$$', name, one);
            FOREACH other IN ARRAY string_to_array('int4 int8 text name bool interval', ' ') LOOP
                EXECUTE format('CREATE FUNCTION public.%I(%s, %s) RETURNS bool LANGUAGE plpgsql AS '
                               '$$BEGIN RAISE EXCEPTION {called}; END$$', name, one, other);
            END LOOP;
        END LOOP;
    END LOOP;
END
$do$
"""


def create_overloads(connection: psycopg.Connection[Any]) -> None:
    """Create functions and operators in public for all types, beside those of PostgreSQL."""

    def literal(words: str) -> str:
        return psycopg.sql.Literal(" ".join(words.split())).as_string(connection)

    connection.execute(
        _CREATE.format(
            types=literal(_TYPES),
            operators=literal(_OPERATORS),
            functions=literal(_FUNCTIONS),
            called=f"''{CALLED}''",
        )
    )
