//! CBOR as C2PA writes it: deterministic (RFC 8949, 4.2.1), so that equal values have equal bytes.

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Unsigned(u64),
    /// `-1 - n`.
    Negative(u64),
    Bytes(Vec<u8>),
    Text(String),
    Array(Vec<Value>),
    Map(Vec<(Value, Value)>),
    Tag(u64, Box<Value>),
    Bool(bool),
    Null,
}

impl Value {
    pub fn text(text: impl Into<String>) -> Value {
        Value::Text(text.into())
    }

    /// A map from texts. Fields without a value are left out.
    pub fn object(fields: impl IntoIterator<Item = (&'static str, Option<Value>)>) -> Value {
        Value::Map(fields.into_iter().filter_map(|(name, value)| Some((Value::text(name), value?))).collect())
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write(&mut out);
        out
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Value::Unsigned(value) => head(out, 0, *value),
            Value::Negative(value) => head(out, 1, *value),
            Value::Bytes(bytes) => {
                head(out, 2, bytes.len() as u64);
                out.extend(bytes);
            }
            Value::Text(text) => {
                head(out, 3, text.len() as u64);
                out.extend(text.as_bytes());
            }
            Value::Array(values) => {
                head(out, 4, values.len() as u64);
                values.iter().for_each(|value| value.write(out));
            }
            Value::Map(entries) => {
                head(out, 5, entries.len() as u64);
                let mut entries: Vec<_> = entries.iter().map(|(key, value)| (key.encode(), value)).collect();
                entries.sort_by(|(a, _), (b, _)| a.cmp(b));
                for (key, value) in entries {
                    out.extend(key);
                    value.write(out);
                }
            }
            Value::Tag(tag, value) => {
                head(out, 6, *tag);
                value.write(out);
            }
            Value::Bool(value) => out.push(0xf4 + u8::from(*value)),
            Value::Null => out.push(0xf6),
        }
    }
}

/// A major type with its argument, as short as possible.
fn head(out: &mut Vec<u8>, major: u8, argument: u64) {
    let major = major << 5;
    match argument {
        0..24 => out.push(major | argument as u8),
        24..=0xff => out.extend([major | 24, argument as u8]),
        0x100..=0xffff => {
            out.push(major | 25);
            out.extend((argument as u16).to_be_bytes());
        }
        0x1_0000..=0xffff_ffff => {
            out.push(major | 26);
            out.extend((argument as u32).to_be_bytes());
        }
        _ => {
            out.push(major | 27);
            out.extend(argument.to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Examples of RFC 8949, appendix A.
    #[test]
    fn values_have_the_bytes_of_the_standard() {
        let text = |text: &str| Value::text(text);
        for (value, bytes) in [
            (Value::Unsigned(23), "17"),
            (Value::Unsigned(24), "1818"),
            (Value::Unsigned(1000), "1903e8"),
            (Value::Unsigned(1_000_000), "1a000f4240"),
            (Value::Unsigned(u64::MAX), "1bffffffffffffffff"),
            (Value::Negative(99), "3863"),
            (Value::Bytes(vec![1, 2, 3, 4]), "4401020304"),
            (text("ü"), "62c3bc"),
            (
                Value::Tag(0, text("2013-03-21T20:04:00Z").into()),
                "c074323031332d30332d32315432303a30343a30305a",
            ),
            (Value::Array(vec![Value::Bool(false), Value::Null]), "82f4f6"),
            (
                Value::Map(vec![(text("b"), Value::Array(vec![])), (text("a"), Value::Unsigned(1))]),
                "a26161016162 80",
            ),
        ] {
            let hex: String = value.encode().iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex, bytes.replace(' ', ""), "{value:?}");
        }
    }

    #[test]
    fn keys_are_sorted_by_their_bytes() {
        let keys = [Value::text("aa"), Value::Unsigned(33), Value::text("b"), Value::Unsigned(1)];
        let map = Value::Map(keys.into_iter().map(|key| (key, Value::Null)).collect()).encode();
        assert_eq!(map, [0xa4, 1, 0xf6, 0x18, 33, 0xf6, 0x61, b'b', 0xf6, 0x62, b'a', b'a', 0xf6]);
    }
}
