//! Block tables and slot mappings: which blocks hold a request, and where each of its tokens goes.
