"""Is a batch decoder output-equivalent, and if not, what broke? (arXiv 2510.22876, sections 2 and 4.2)"""
