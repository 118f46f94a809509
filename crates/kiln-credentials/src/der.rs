//! Reading DER, the encoding of certificates: lengths and tags, checked against the bytes that are there.

/// Tags that are read here.
pub(crate) const BOOLEAN: u8 = 0x01;
pub(crate) const BIT_STRING: u8 = 0x03;
pub(crate) const OCTET_STRING: u8 = 0x04;
pub(crate) const OBJECT_IDENTIFIER: u8 = 0x06;
pub(crate) const UTC_TIME: u8 = 0x17;
pub(crate) const GENERALIZED_TIME: u8 = 0x18;
pub(crate) const SEQUENCE: u8 = 0x30;
pub(crate) const SET: u8 = 0x31;

/// An element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Element<'a> {
    pub tag: u8,
    pub content: &'a [u8],
    /// It, with tag and length.
    pub whole: &'a [u8],
}

impl<'a> Element<'a> {
    /// Reads the first element; returns what follows it, too.
    pub fn read(bytes: &'a [u8]) -> Option<(Element<'a>, &'a [u8])> {
        let (&tag, rest) = bytes.split_first()?;
        let (&first, rest) = rest.split_first()?;
        let (length, rest) = match first {
            0..=0x7f => (usize::from(first), rest),
            0x81..=0x84 => {
                let (digits, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
                (digits.iter().fold(0, |length, digit| length << 8 | usize::from(*digit)), rest)
            }
            _ => return None,
        };
        let (content, after) = rest.split_at_checked(length)?;
        Some((Element { tag, content, whole: &bytes[..bytes.len() - after.len()] }, after))
    }

    /// The elements inside, to the first that is damaged.
    pub fn children(self) -> impl Iterator<Item = Element<'a>> {
        let mut rest = self.content;
        std::iter::from_fn(move || {
            let (element, after) = Element::read(rest)?;
            rest = after;
            Some(element)
        })
    }
}
