"""What a reduced model costs, keeps and gets right."""
