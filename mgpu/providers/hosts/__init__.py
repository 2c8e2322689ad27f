"""Provider `hosts`: machines that are there already, taken by SSH and given back."""
