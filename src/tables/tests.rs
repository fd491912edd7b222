//! Tables against a naive model, and the rules of single calls.
