"""The API server and its objects: requests, credentials, names, YAML."""
