//! Which tokens of a prompt attend to each other in both directions: those of one image.

/// What an item of a prompt is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Modality {
    /// A picture.
    Image,
    /// A series of pictures.
    Video,
    /// Sound.
    Audio,
    /// Anything else.
    Other,
}

impl Modality {
    /// Every modality.
    pub const ALL: [Modality; 4] = [
        Modality::Image,
        Modality::Video,
        Modality::Audio,
        Modality::Other,
    ];

    /// Whether its tokens attend in both directions.
    pub fn attends_both_ways(self) -> bool {
        matches!(self, Modality::Image | Modality::Video)
    }
}

/// An item of a prompt: a run of placeholder tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MultimodalItem<'a> {
    /// What it is.
    pub modality: Modality,
    /// Its first token.
    pub offset: i64,
    /// Its tokens.
    pub length: i64,
    /// For each of its tokens whether an embedding replaces it, 0 when not; `None` when that holds
    /// for all.
    pub is_embedded: Option<&'a [u8]>,
}

/// Tokens from `first` to `last`, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenRange {
    /// The first token.
    pub first: i64,
    /// The last one.
    pub last: i64,
}

/// Why an item has no ranges.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MultimodalError {
    /// A position or a length below 0, or one that leaves 63 bits.
    #[error("offset {offset} and length {length} are no tokens of a sequence")]
    Place {
        /// Where it is said to start.
        offset: i64,
        /// How long it is said to be.
        length: i64,
    },
    /// A mask with another number of flags than the item has tokens.
    #[error("{flags} flags for {length} tokens")]
    MaskLength {
        /// Its flags.
        flags: usize,
        /// Its tokens.
        length: i64,
    },
}

/// Calls `visit` with each run of embedded tokens of an image or video, in order. Runs longer
/// than `window` are left out: their first tokens would see past it. An empty item has none.
pub fn visit_ranges(
    item: &MultimodalItem<'_>,
    window: Option<u64>,
    mut visit: impl FnMut(TokenRange),
) -> Result<(), MultimodalError> {
    check(item)?;
    if !item.modality.attends_both_ways() {
        return Ok(());
    }
    let mut run = |start: i64, end: i64| {
        if start < end && window.is_none_or(|window| start.abs_diff(end) <= window) {
            visit(TokenRange {
                first: item.offset + start,
                last: item.offset + end - 1,
            });
        }
    };
    let Some(mask) = item.is_embedded else {
        run(0, item.length);
        return Ok(());
    };
    let mut start = 0;
    for (token, &embedded) in (0..).zip(mask) {
        if embedded == 0 {
            run(start, token);
            start = token + 1;
        }
    }
    run(start, item.length);
    Ok(())
}

fn check(item: &MultimodalItem<'_>) -> Result<(), MultimodalError> {
    let (offset, length) = (item.offset, item.length);
    if offset < 0 || length < 0 || offset.checked_add(length).is_none() {
        return Err(MultimodalError::Place { offset, length });
    }
    match item.is_embedded.map(<[u8]>::len) {
        Some(flags) if flags as u64 != length.unsigned_abs() => {
            Err(MultimodalError::MaskLength { flags, length })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn image(offset: i64, length: i64, is_embedded: Option<&[u8]>) -> MultimodalItem<'_> {
        MultimodalItem {
            modality: Modality::Image,
            offset,
            length,
            is_embedded,
        }
    }

    fn ranges(items: &[MultimodalItem<'_>], window: Option<u64>) -> Vec<(i64, i64)> {
        let mut all = Vec::new();
        for item in items {
            visit_ranges(item, window, |r| all.push((r.first, r.last))).unwrap();
        }
        all
    }

    #[test]
    fn m01_a_range_is_kept_up_to_the_window() {
        let audio = MultimodalItem {
            modality: Modality::Audio,
            ..image(20, 3, None)
        };
        let items = [image(10, 4, None), audio, image(30, 5, None)];
        assert_eq!(ranges(&items, None), [(10, 13), (30, 34)]);
        assert_eq!(ranges(&items, Some(5)), [(10, 13), (30, 34)]);
        assert_eq!(ranges(&items, Some(4)), [(10, 13)]);
        assert_eq!(ranges(&items, Some(0)), []);
        assert_eq!(ranges(&[], None), []);
    }

    #[test]
    fn m04_a_mask_splits_an_item_into_runs() {
        let mask = [0, 1, 0, 1, 1];
        assert_eq!(ranges(&[image(2, 5, Some(&mask))], None), [(3, 3), (5, 6)]);
        assert_eq!(ranges(&[image(2, 2, Some(&[0; 2]))], None), []);
        assert_eq!(
            ranges(&[image(7, 0, None), image(7, 0, Some(&[]))], None),
            []
        );
    }

    #[test]
    fn what_is_no_run_of_tokens_is_refused() {
        let refused = |item| visit_ranges(&item, None, |_| ()).unwrap_err();
        for (offset, length) in [(-1, 2), (3, -1), (i64::MAX, 1), (1, i64::MAX)] {
            assert!(matches!(
                refused(image(offset, length, None)),
                MultimodalError::Place { .. }
            ));
        }
        assert!(matches!(
            refused(image(0, 3, Some(&[1]))),
            MultimodalError::MaskLength { flags: 1, .. }
        ));
    }

    proptest! {
        #[test]
        fn tokens_in_ranges_are_the_embedded_ones(
            offset in 0i64..1000,
            mask in prop::collection::vec(0u8..2, 0..60),
            window in prop::option::of(0u64..8),
        ) {
            let found = ranges(&[image(offset, mask.len() as i64, Some(&mask))], window);
            let mut inside = vec![false; mask.len()];
            for &(first, last) in &found {
                prop_assert!(first <= last);
                prop_assert!(window.is_none_or(|w| (last - first + 1) as u64 <= w));
                for token in first..=last {
                    inside[(token - offset) as usize] = true;
                }
            }
            for (token, &embedded) in mask.iter().enumerate() {
                let start = mask[..token].iter().rposition(|&e| e == 0).map_or(0, |t| t + 1);
                let end = mask[token..].iter().position(|&e| e == 0).map_or(mask.len(), |t| token + t);
                let fits = window.is_none_or(|w| end.saturating_sub(start) as u64 <= w);
                prop_assert_eq!(inside[token], embedded != 0 && fits);
            }
        }
    }
}
