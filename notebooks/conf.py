"""Sphinx settings of the documentation site.

python -m sphinx -W -b html notebooks build/site
"""

import sdm_jax

project = "sdm_jax"
author = "the sdm_jax authors"
copyright = "the sdm_jax authors, Apache-2.0"
release = sdm_jax.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nb_execution_mode = "off"  # the notebooks are committed with their outputs; the tests execute them
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]

autodoc_typehints = "none"  # docstrings say shapes and dtypes
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
add_module_names = False
default_role = "code"  # docstrings write names in single backticks

html_theme = "furo"
html_title = f"sdm_jax {release}"
html_copy_source = False
