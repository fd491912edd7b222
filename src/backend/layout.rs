//! Layouts as named axes: an ordered list of dimensions, each one axis or several fused ones, and
//! the order in which the dimensions lie in memory.

use std::fmt;

/// What a dimension counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Kernel blocks.
    Block,
    /// Keys, then values.
    Kv,
    /// Key-value heads.
    Head,
    /// Stored slots of a kernel block.
    Token,
    /// Elements of one key or one value of one token and head.
    Content,
}

impl Axis {
    /// Every axis.
    pub const ALL: [Axis; 5] = [
        Axis::Block,
        Axis::Kv,
        Axis::Head,
        Axis::Token,
        Axis::Content,
    ];

    /// The name in a layout's text.
    pub const fn name(self) -> &'static str {
        match self {
            Axis::Block => "block",
            Axis::Kv => "kv",
            Axis::Head => "head",
            Axis::Token => "token",
            Axis::Content => "content",
        }
    }
}

/// How a view's dimensions are made of axes, and how they lie in memory.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Layout {
    dims: Vec<Vec<Axis>>,
    order: Vec<usize>,
}

/// Why a layout cannot exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A word that is no axis.
    #[error(
        "\"{word}\" in layout \"{text}\" is no axis; the axes are block, kv, head, token, content"
    )]
    UnknownAxis {
        /// The word.
        word: String,
        /// The whole text.
        text: String,
    },
    /// An axis that stands twice.
    #[error("axis {axis} stands twice in layout \"{text}\"")]
    AxisTwice {
        /// The axis.
        axis: &'static str,
        /// The whole text.
        text: String,
    },
    /// An axis that every layout needs.
    #[error("axis {axis} is missing from layout \"{text}\"")]
    AxisMissing {
        /// The axis.
        axis: &'static str,
        /// The whole text.
        text: String,
    },
    /// A memory order with another number of dimensions than the layout.
    #[error("memory order \"{order}\" has {given} dimensions, layout \"{text}\" has {wanted}")]
    OrderLength {
        /// The memory order.
        order: String,
        /// Its dimensions.
        given: usize,
        /// The layout.
        text: String,
        /// Its dimensions.
        wanted: usize,
    },
    /// A memory order that names a dimension the layout does not have, or one twice.
    #[error(
        "memory order \"{order}\" must name each dimension of layout \"{text}\" once; \"{dim}\" is not left"
    )]
    OrderDim {
        /// The memory order.
        order: String,
        /// The layout.
        text: String,
        /// The dimension in question.
        dim: String,
    },
}

impl Layout {
    /// Reads a layout such as `block | head | token | kv*content`: dimensions between bars, fused
    /// axes joined by `*`, outermost first. `memory_order` lists the same dimensions as they lie in
    /// memory; `None` when they lie as they are listed.
    pub fn parse(text: &str, memory_order: Option<&str>) -> Result<Layout, LayoutError> {
        let dims = parse_dims(text)?;
        check_axes(&dims, text)?;
        let order = match memory_order {
            None => (0..dims.len()).collect(),
            Some(order) => parse_order(order, &dims, text)?,
        };
        Ok(Layout { dims, order })
    }

    /// The axes of each dimension, in the order of the view's dimensions.
    pub fn dims(&self) -> &[Vec<Axis>] {
        &self.dims
    }

    /// Which dimension lies outermost in memory, which next, and so on.
    pub fn memory_order(&self) -> &[usize] {
        &self.order
    }

    /// The axes as they lie in memory, outermost first.
    pub fn axes_in_memory(&self) -> impl DoubleEndedIterator<Item = Axis> + Clone + '_ {
        self.order
            .iter()
            .flat_map(|&dim| self.dims[dim].iter().copied())
    }

    /// The dimension that an axis is part of.
    pub fn dim_of(&self, axis: Axis) -> Option<usize> {
        self.dims.iter().position(|dim| dim.contains(&axis))
    }

    /// Whether keys and values lie beside each other in one dimension, so that their widths may
    /// differ.
    pub fn fuses_kv_with_content(&self) -> bool {
        let adjacent = |dim: &Vec<Axis>| dim.windows(2).any(|w| w == [Axis::Kv, Axis::Content]);
        self.dims.iter().any(adjacent)
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_dims(f, self.dims.iter())?;
        if self.order.iter().enumerate().any(|(i, &dim)| i != dim) {
            f.write_str(", in memory ")?;
            write_dims(f, self.order.iter().map(|&dim| &self.dims[dim]))?;
        }
        Ok(())
    }
}

fn write_dims<'a>(
    f: &mut fmt::Formatter<'_>,
    dims: impl Iterator<Item = &'a Vec<Axis>>,
) -> fmt::Result {
    for (i, dim) in dims.enumerate() {
        if i > 0 {
            f.write_str(" | ")?;
        }
        for (j, axis) in dim.iter().enumerate() {
            f.write_str(if j > 0 { "*" } else { "" })?;
            f.write_str(axis.name())?;
        }
    }
    Ok(())
}

fn parse_dims(text: &str) -> Result<Vec<Vec<Axis>>, LayoutError> {
    let axis = |word: &str| {
        let found = Axis::ALL
            .into_iter()
            .find(|axis| axis.name() == word.trim());
        found.ok_or_else(|| LayoutError::UnknownAxis {
            word: word.trim().to_owned(),
            text: text.to_owned(),
        })
    };
    text.split('|')
        .map(|dim| dim.split('*').map(axis).collect())
        .collect()
}

fn check_axes(dims: &[Vec<Axis>], text: &str) -> Result<(), LayoutError> {
    for axis in Axis::ALL {
        let times = dims.iter().flatten().filter(|&&a| a == axis).count();
        let required = matches!(axis, Axis::Block | Axis::Token | Axis::Content);
        let (axis, text) = (axis.name(), text.to_owned());
        match times {
            0 if required => return Err(LayoutError::AxisMissing { axis, text }),
            0 | 1 => {}
            _ => return Err(LayoutError::AxisTwice { axis, text }),
        }
    }
    Ok(())
}

fn parse_order(order: &str, dims: &[Vec<Axis>], text: &str) -> Result<Vec<usize>, LayoutError> {
    let listed = parse_dims(order)?;
    if listed.len() != dims.len() {
        return Err(LayoutError::OrderLength {
            order: order.to_owned(),
            given: listed.len(),
            text: text.to_owned(),
            wanted: dims.len(),
        });
    }
    let mut found: Vec<usize> = Vec::with_capacity(dims.len());
    for dim in &listed {
        match dims.iter().position(|d| d == dim) {
            Some(index) if !found.contains(&index) => found.push(index),
            _ => {
                let names: Vec<&str> = dim.iter().map(|axis| axis.name()).collect();
                return Err(LayoutError::OrderDim {
                    order: order.to_owned(),
                    text: text.to_owned(),
                    dim: names.join("*"),
                });
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_reads_and_prints() {
        let nhd = Layout::parse(
            "block|head|token|kv*content",
            Some("block | token | head | kv*content"),
        )
        .unwrap();
        assert_eq!(nhd.memory_order(), [0, 2, 1, 3]);
        assert_eq!(nhd.dim_of(Axis::Kv), Some(3));
        assert!(nhd.fuses_kv_with_content());
        assert_eq!(
            nhd.to_string(),
            "block | head | token | kv*content, in memory block | token | head | kv*content"
        );
        let flat = Layout::parse("block | kv*token*head*content", None).unwrap();
        assert!(!flat.fuses_kv_with_content());
        assert_eq!(flat.axes_in_memory().nth(2), Some(Axis::Token));
    }

    #[test]
    fn a_layout_that_makes_no_sense_is_refused() {
        let parse = |text, order| Layout::parse(text, order).unwrap_err();
        assert!(matches!(parse("", None), LayoutError::UnknownAxis { .. }));
        assert!(matches!(
            parse("block|layer|token|content", None),
            LayoutError::UnknownAxis { word, .. } if word == "layer"
        ));
        assert!(matches!(
            parse("block|head|token", None),
            LayoutError::AxisMissing {
                axis: "content",
                ..
            }
        ));
        assert!(matches!(
            parse("block|kv|token|kv*content", None),
            LayoutError::AxisTwice { axis: "kv", .. }
        ));
        assert!(matches!(
            parse("block|token|content", Some("block|token")),
            LayoutError::OrderLength {
                given: 2,
                wanted: 3,
                ..
            }
        ));
        assert!(matches!(
            parse("block|token|content", Some("block|block|content")),
            LayoutError::OrderDim { dim, .. } if dim == "block"
        ));
    }
}
