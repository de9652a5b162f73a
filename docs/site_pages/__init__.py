"""Pages of the site that are made when it is built: from docstrings, results and root files."""
