"""A registry is asked and logged in to: names, logins, its HTTP API, its failures in our words."""
