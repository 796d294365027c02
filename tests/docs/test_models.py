"""The models that README and docs/models.md name are those that there are."""

import re
from pathlib import Path

from axon.checkpoint.huggingface.tables import known

ROOT = Path(__file__).parents[2]


def test_every_architecture_is_in_the_table_and_every_family_in_the_readme():
    table, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/models.md", "README.md"))
    assert not [name for name in known() if f"`{name}`" not in table]
    models = re.sub("[^a-z0-9]", "", readme.split("## Models")[1].split("\n## ")[0].lower())
    families = [path.stem.replace("_", "") for path in (ROOT / "models").glob("[a-z]*.py")]
    assert not [family for family in families if family not in models]
