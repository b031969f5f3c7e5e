"""Messages to people outside: webhooks, chats, and with apprise installed mail and what else it knows."""
