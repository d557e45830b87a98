"""Write the folder of the version in pyproject.toml: `python -m tests.released`."""

from __future__ import annotations

from tests.distribution.release import version_in
from tests.released import FOLDER, public_names, schema_sql


def main() -> None:
    """Write `schema.sql` and `public.txt`, and print where."""
    version = version_in((FOLDER.parent.parent / "pyproject.toml").read_text())
    folder = FOLDER / version
    folder.mkdir(exist_ok=True)
    (folder / "schema.sql").write_text(schema_sql())
    (folder / "public.txt").write_text("\n".join([*public_names(), ""]))
    print(f"{folder} has the tables and the public names of {version}")


if __name__ == "__main__":
    main()
