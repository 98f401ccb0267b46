"""The page of the server, at `/`: files that were built from `page/`, and how they are answered."""
