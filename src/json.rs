//! JSON texts that grow with what a caller made, so that there may be no memory for one.

use std::io;

use serde::{Serialize, Serializer};

/// The host has no memory for a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("there is no memory for the text, of which {bytes} bytes were made")]
pub struct NoMemory {
    /// Bytes that there was room for.
    pub bytes: usize,
}

/// A value as text.
pub fn text(value: &impl Serialize) -> Result<String, NoMemory> {
    let mut text = Text(Vec::new());
    let written = serde_json::to_writer(&mut text, value);
    let bytes = text.0.len();
    // Strings and numbers can always be written, as UTF-8.
    let failed = NoMemory { bytes };
    written.map_err(|_| failed)?;
    String::from_utf8(text.0).map_err(|_| failed)
}

struct Text(Vec<u8>);

impl io::Write for Text {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let reserved = self.0.try_reserve(bytes.len());
        reserved.map_err(|_| io::ErrorKind::OutOfMemory)?;
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A list that is never held: its values are made while it is written.
pub struct Each<F>(pub F);

impl<F, I> Serialize for Each<F>
where
    F: Fn() -> I,
    I: IntoIterator,
    I::Item: Serialize,
{
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((self.0)())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_written_as_they_are_made() {
        let squares = Each(|| (1..4).map(|number| number * number));
        assert_eq!(text(&squares), Ok("[1,4,9]".to_owned()));
        assert_eq!(text(&Each(|| [0u8; 0])), Ok("[]".to_owned()));
    }
}
