# SPDX-License-Identifier: Apache-2.0
"""Sphinx's settings; `docs.site.gather` copies this file beside the sources that it
puts together.
"""

from html import escape
from pathlib import Path

import upref
from docs.site import api

project = "upref"
author = "The upref contributors"
project_copyright = "The upref contributors, Apache-2.0"
version = release = upref.__version__
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx_design",
    "sphinx_copybutton",
]
exclude_patterns = ["_static"]
# a draft for another project has its template's headings
suppress_warnings = ["myst.header"]
highlight_language = "none"
smartquotes = False  # --flag and "value" stay as they are typed

# ---- pages ---------------------------------------------------------------------------
myst_enable_extensions = [
    "amsmath",
    "attrs_block",
    "attrs_inline",
    "colon_fence",
    "deflist",
    "dollarmath",
]
myst_heading_anchors = 4  # as GitHub names them
myst_links_external_new_tab = False
nb_execution_mode = (
    # of the pages with {code-cell}; the others' output is in the repository, held fresh
    # by a test
    "force"
)
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_execution_show_tb = True
nb_merge_streams = True
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

# ---- API -----------------------------------------------------------------------------
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
nitpick_ignore_regex = [("py:.*", r".*")]

# ---- mathematics, without a network --------------------------------------------------
# one file, its glyphs inside; docs/site/gather.py takes it from a wheel
mathjax_path = "mathjax/tex-svg.js"
mathjax3_config = {"options": {"enableMenu": False}, "svg": {"fontCache": "local"}}

# ---- theme ---------------------------------------------------------------------------
html_theme = "pydata_sphinx_theme"
html_title = f"upref {release}"
html_short_title = "upref"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_favicon = "_static/favicon.svg"
html_search_scorer = str(Path(__file__).parent / "_static/search_scorer.js")
html_copy_source = html_show_sourcelink = False
html_last_updated_fmt = None
html_sidebars = {
    page: []
    for page in ("index", "start", "explorer", "api", "search", "genindex", "files/**")
}
html_theme_options = {
    "logo": {
        "text": "upref",
        "image_light": "_static/favicon.svg",
        "image_dark": "_static/favicon.svg",
    },
    "navbar_align": "left",
    "header_links_before_dropdown": 9,
    "navbar_end": ["theme-switcher"],
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "back_to_top_button": False,
}


ABOUT = "Reference and verification of the policy-gradient losses that train reasoning LLMs."


def describe(app, pagename, templatename, context, doctree):
    """Add a description for search engines, and for links that people share, to the
    context of a page: Sphinx's event html-page-context.
    """
    title = context.get("title") or "upref"
    tags = {
        "description": ABOUT,
        "og:title": f"{title} - upref",
        "og:description": ABOUT,
        "og:type": "website",
    }
    lines = []
    for name, content in tags.items():
        attribute = "property" if name.startswith("og:") else "name"
        lines.append(f'<meta {attribute}="{name}" content="{escape(content)}">')
    context["metatags"] = "\n".join([context.get("metatags", ""), *lines])


def setup(app):
    """Connect the events; Sphinx calls this."""
    app.connect("autodoc-process-docstring", api.process)
    app.connect("html-page-context", describe)
