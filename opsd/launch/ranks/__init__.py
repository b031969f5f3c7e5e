"""The processes of one node: started, listened to, ended."""
