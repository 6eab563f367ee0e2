"""Sequential heads that ship with dspark, one a module. Only ``dspark.plugins.builtin`` imports them."""
