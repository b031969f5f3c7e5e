"""What post-training needs beside its trainers: an audit of the first batches, chats, and the check of a checkpoint."""
