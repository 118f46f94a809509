//! DER, the encoding of certificates and time stamps. Lengths that are read are checked against the bytes that are there.

/// Tags.
pub(crate) const BOOLEAN: u8 = 0x01;
pub(crate) const INTEGER: u8 = 0x02;
pub(crate) const BIT_STRING: u8 = 0x03;
pub(crate) const OCTET_STRING: u8 = 0x04;
pub(crate) const NULL: u8 = 0x05;
pub(crate) const OBJECT_IDENTIFIER: u8 = 0x06;
pub(crate) const UTC_TIME: u8 = 0x17;
pub(crate) const GENERALIZED_TIME: u8 = 0x18;
pub(crate) const SEQUENCE: u8 = 0x30;
pub(crate) const SET: u8 = 0x31;

/// Writes an element.
pub(crate) fn element(tag: u8, content: &[u8]) -> Vec<u8> {
    let digits = content.len().to_be_bytes();
    let digits = &digits[digits.iter().position(|digit| *digit != 0).unwrap_or(digits.len())..];
    let length = match digits {
        [] => vec![0],
        [short @ 0..=0x7f] => vec![*short],
        digits => [&[0x80 | digits.len() as u8], digits].concat(),
    };
    [&[tag], &length[..], content].concat()
}

/// An element that is read.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_any_length_are_read_back() {
        for length in [0, 1, 127, 128, 255, 256, 65_535, 65_536] {
            let content: Vec<u8> = (0..length).map(|i| i as u8).collect();
            let written = [element(OCTET_STRING, &content), vec![7]].concat();
            let (read, rest) = Element::read(&written).unwrap();
            assert_eq!((read.tag, read.content, rest), (OCTET_STRING, &content[..], &[7][..]));
            assert!(Element::read(&written[..written.len() - 2]).is_none());
        }
        assert_eq!(element(SEQUENCE, &[0; 200])[..3], [0x30, 0x81, 200]);
    }
}
