//! The memory as a picture.
use crate::planning::Answer;

/// The picture as SVG.
pub fn svg(_answer: &Answer) -> String {
    String::new()
}
