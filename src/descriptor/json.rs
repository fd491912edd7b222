//! A descriptor as JSON: in the order of the fields, without blanks.

use serde::Deserialize;

use super::{Descriptor, DescriptorError, VERSION};
use crate::json::{self, NoMemory};

impl Descriptor {
    /// The descriptor as one JSON object. The same descriptor gives the same text.
    pub fn to_json(&self) -> Result<String, NoMemory> {
        json::text(self)
    }

    /// Reads a descriptor and checks everything that it says. Keys that this version does not know
    /// are passed over.
    pub fn from_json(text: &[u8]) -> Result<Descriptor, DescriptorError> {
        let failed = |error: serde_json::Error| DescriptorError::Json(error.to_string());
        // First the version, since of another one nothing else is known.
        let head: Head = serde_json::from_slice(text).map_err(failed)?;
        if head.descriptor_version != VERSION {
            return Err(DescriptorError::Version {
                found: head.descriptor_version,
            });
        }
        let descriptor: Descriptor = serde_json::from_slice(text).map_err(failed)?;
        descriptor.check()?;
        Ok(descriptor)
    }
}

#[derive(Deserialize)]
struct Head {
    descriptor_version: u64,
}

/// An element type by its name.
pub(super) mod dtype {
    use serde::{Deserialize, Deserializer, Serializer, de};

    use crate::dtype::Dtype;

    pub(in crate::descriptor) fn serialize<S: Serializer>(
        dtype: &Dtype,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_str(dtype.name())
    }

    pub(in crate::descriptor) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Dtype, D::Error> {
        named(&String::deserialize(from)?)
    }

    pub(super) fn named<E: de::Error>(name: &str) -> Result<Dtype, E> {
        let found = Dtype::ALL.into_iter().find(|dtype| dtype.name() == name);
        found.ok_or_else(|| E::custom(format!("\"{name}\" is no element type")))
    }
}

/// An element type by its name, or null.
pub(super) mod optional_dtype {
    use serde::{Deserialize, Deserializer, Serializer};

    use super::dtype::named;
    use crate::dtype::Dtype;

    pub(in crate::descriptor) fn serialize<S: Serializer>(
        dtype: &Option<Dtype>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match dtype {
            Some(dtype) => to.serialize_str(dtype.name()),
            None => to.serialize_none(),
        }
    }

    pub(in crate::descriptor) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Dtype>, D::Error> {
        let name = Option::<String>::deserialize(from)?;
        name.as_deref().map(named).transpose()
    }
}
