"""What collectors are made of: no plug-ins, but readers, parsers and the series that several of them share."""
