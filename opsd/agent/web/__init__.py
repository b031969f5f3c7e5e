"""What the agent says over HTTP: metrics, the API, and pages for people."""
