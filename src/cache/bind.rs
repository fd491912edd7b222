//! Which layer comes when: the order in which an engine binds caches to its layers.

use std::collections::HashMap;

/// Why layers cannot be bound.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// A name without the number it needs, or with more than one.
    #[error("layer {layer}: the name must have exactly one part that is a number, it has {found}")]
    NotOneInteger {
        /// The layer.
        layer: String,
        /// Numbers found.
        found: usize,
    },
    /// A name with too many numbers.
    #[error("layer {layer}: the name must have at most two parts that are numbers, it has {found}")]
    TooManyIntegers {
        /// The layer.
        layer: String,
        /// Numbers found.
        found: usize,
    },
    /// A module number that the layer before it already counts.
    #[error(
        "layer {layer}: module {module} is out of range, a layer has {modules} attention modules"
    )]
    ModuleOutOfRange {
        /// The layer.
        layer: String,
        /// The module.
        module: u64,
        /// Modules of a layer.
        modules: u64,
    },
    /// A number that does not fit.
    #[error("layer {layer}: a number in the name does not fit in 63 bits")]
    IndexOverflow {
        /// The layer.
        layer: String,
    },
    /// Two layers that would be one index though their names say otherwise.
    #[error(
        "layers {first} and {second} both get index {index}: one names its module, the other does not"
    )]
    Collision {
        /// A layer.
        first: String,
        /// Another layer.
        second: String,
        /// The index of both.
        index: u64,
    },
    /// No modules at all.
    #[error("the number of attention modules is 0; it must be at least 1")]
    NoModules,
    /// The engine's list has entries already.
    #[error("the engine's list of caches must be empty, it has {entries} entries")]
    ListNotEmpty {
        /// Entries it has.
        entries: u64,
    },
    /// A cache for a layer that the engine does not have.
    #[error("layer {layer} has a cache, but the engine has no layer of that name")]
    ContextMissing {
        /// The layer.
        layer: String,
    },
}

/// The place of a layer by the numbers in its name, and whether the name says which module it is.
struct Place {
    index: u64,
    names_module: bool,
}

/// The index of a layer by the numbers in its dotted name: `model.layers.7.self_attn` is 7. With
/// several attention modules in a layer a second number is the module: of 2, `layers.3.self_attn.1`
/// is 3 · 2 + 1. A number is a part of ASCII digits only.
pub fn layer_index(name: &str, num_modules: u64) -> Result<u64, BindError> {
    place(name, num_modules).map(|place| place.index)
}

fn place(name: &str, num_modules: u64) -> Result<Place, BindError> {
    if num_modules == 0 {
        return Err(BindError::NoModules);
    }
    let is_number = |part: &&str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let mut numbers = [""; 2];
    let mut found = 0;
    for part in name.split('.').filter(is_number) {
        if let Some(number) = numbers.get_mut(found) {
            *number = part;
        }
        found += 1;
    }
    let overflow = || BindError::IndexOverflow {
        layer: name.to_owned(),
    };
    let parse = |text: &str| {
        let number = text.parse::<u64>().ok();
        number
            .filter(|&number| number <= crate::num::MAX)
            .ok_or_else(overflow)
    };
    let has_modules = num_modules > 1 && name.contains("attn");
    match (found, has_modules) {
        (1, _) => Ok(Place {
            index: parse(numbers[0])?,
            names_module: false,
        }),
        (2, true) => {
            let module = parse(numbers[1])?;
            if module >= num_modules {
                return Err(BindError::ModuleOutOfRange {
                    layer: name.to_owned(),
                    module,
                    modules: num_modules,
                });
            }
            let first = parse(numbers[0])?.checked_mul(num_modules);
            let index = first.and_then(|first| first.checked_add(module));
            Ok(Place {
                index: index
                    .filter(|&i| i <= crate::num::MAX)
                    .ok_or_else(overflow)?,
                names_module: true,
            })
        }
        (0, _) | (_, false) => Err(BindError::NotOneInteger {
            layer: name.to_owned(),
            found,
        }),
        _ => Err(BindError::TooManyIntegers {
            layer: name.to_owned(),
            found,
        }),
    }
}

/// The numbers of `layers` in binding order: by index, and layers of one index as they are listed.
/// Several layers may have one index (self and cross attention of one decoder layer).
pub fn bind_order(layers: &[&str], num_modules: u64) -> Result<Vec<usize>, BindError> {
    let places: Result<Vec<Place>, BindError> =
        layers.iter().map(|name| place(name, num_modules)).collect();
    let places = places?;
    let mut order: Vec<usize> = (0..layers.len()).collect();
    order.sort_by_key(|&layer| places[layer].index);
    for pair in order.windows(2) {
        let (a, b) = (&places[pair[0]], &places[pair[1]]);
        if a.index == b.index && a.names_module != b.names_module {
            return Err(BindError::Collision {
                first: layers[pair[0]].to_owned(),
                second: layers[pair[1]].to_owned(),
                index: a.index,
            });
        }
    }
    Ok(order)
}

/// Binds caches to an engine's layers: the binding order of `layers`, and for each of `context` the
/// layer whose cache it gets. `already_bound` is how many caches the engine's list holds before.
pub fn bind_layers(
    layers: &[&str],
    context: &[&str],
    num_modules: u64,
    already_bound: u64,
) -> Result<(Vec<usize>, Vec<Option<usize>>), BindError> {
    if already_bound != 0 {
        return Err(BindError::ListNotEmpty {
            entries: already_bound,
        });
    }
    let order = bind_order(layers, num_modules)?;
    let by_name: HashMap<&str, usize> = context
        .iter()
        .enumerate()
        .map(|(i, &name)| (name, i))
        .collect();
    let mut bound = vec![None; context.len()];
    for (layer, name) in layers.iter().enumerate() {
        let place = by_name.get(name).ok_or_else(|| BindError::ContextMissing {
            layer: (*name).to_owned(),
        })?;
        bound[*place] = Some(layer);
    }
    Ok((order, bound))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_numbers() {
        // S17, and the forms of a number.
        for (name, modules, index) in [
            ("model.layers.3.self_attn.1.attn", 2, Some(7)),
            ("layers.0.self_attn.2", 2, None),
            ("layers.3.mixer.1", 1, None),
            ("layers.3.mixer", 2, Some(3)),
            ("2.self_attn", 1, Some(2)),
            ("layers.007.attn", 1, Some(7)),
            ("layers.+7.attn", 1, None),
            ("layers.1_0.attn", 1, None),
            ("layers.\u{0661}.attn", 1, None),
            ("layers.attn", 1, None),
            ("layers.1.attn.1.x.0", 2, None),
            ("layers.99999999999999999999.attn", 1, None),
        ] {
            assert_eq!(layer_index(name, modules).ok(), index, "{name}");
        }
    }

    #[test]
    fn order_is_numeric_and_stable() {
        // S19
        let names = ["layers.10", "layers.9", "layers.1.self", "layers.1.cross"];
        assert_eq!(bind_order(&names, 1), Ok(vec![2, 3, 1, 0]));
    }

    #[test]
    fn indices_do_not_collide() {
        let names = ["layers.3.self_attn.attn", "layers.1.self_attn.1.attn"];
        assert!(matches!(
            bind_order(&names, 2),
            Err(BindError::Collision { index: 3, .. })
        ));
    }
}
