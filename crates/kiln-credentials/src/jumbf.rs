//! JUMBF boxes (ISO 19566-5), which hold manifests: length, type, content; a superbox starts with its description.

/// What a superbox holds. Its number is these four letters and a fixed tail.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Store,
    Manifest,
    AssertionStore,
    Claim,
    Signature,
    Cbor,
}

impl Kind {
    fn uuid(self) -> [u8; 16] {
        let name = match self {
            Kind::Store => b"c2pa",
            Kind::Manifest => b"c2ma",
            Kind::AssertionStore => b"c2as",
            Kind::Claim => b"c2cl",
            Kind::Signature => b"c2cs",
            Kind::Cbor => b"cbor",
        };
        let mut uuid = *b"....\x00\x11\x00\x10\x80\x00\x00\xaa\x00\x38\x9b\x71";
        uuid[..4].copy_from_slice(name);
        uuid
    }
}

/// Requestable, with a label.
const TOGGLES: u8 = 0x03;
/// Length and type of a box.
const HEADER: usize = 8;

/// A box.
pub(crate) fn plain(kind: &[u8; 4], content: &[u8]) -> Vec<u8> {
    let mut out = ((HEADER + content.len()) as u32).to_be_bytes().to_vec();
    out.extend(kind);
    out.extend(content);
    out
}

/// A superbox of boxes.
pub(crate) fn superbox(kind: Kind, label: &str, boxes: &[Vec<u8>]) -> Vec<u8> {
    let description = [&kind.uuid()[..], &[TOGGLES], label.as_bytes(), &[0]].concat();
    plain(b"jumb", &[plain(b"jumd", &description), boxes.concat()].concat())
}

/// A superbox with one CBOR value.
pub(crate) fn cbor(kind: Kind, label: &str, value: &[u8]) -> Vec<u8> {
    superbox(kind, label, &[plain(b"cbor", value)])
}

/// The bytes that the hash of a superbox is of: all but its own header.
pub(crate) fn hashed(superbox: &[u8]) -> &[u8] {
    superbox.get(HEADER..).unwrap_or_default()
}

/// A superbox that was read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Superbox<'a> {
    /// Its label; empty if it has none.
    pub label: &'a str,
    /// It, with its header.
    pub whole: &'a [u8],
    content: &'a [u8],
}

impl<'a> Superbox<'a> {
    /// Reads the superbox at the start of `bytes`; `None` if it is none, or not there as a whole.
    pub fn read(bytes: &'a [u8]) -> Option<Superbox<'a>> {
        let (kind, whole) = first(bytes)?;
        let inside = whole.get(HEADER..).filter(|_| kind == *b"jumb")?;
        let (kind, description) = first(inside)?;
        let fields = description.get(HEADER..).filter(|_| kind == *b"jumd")?;
        let (_uuid, rest) = fields.split_at_checked(16)?;
        let (toggles, rest) = rest.split_first()?;
        let label = match toggles & 0x02 {
            0 => "",
            _ => std::str::from_utf8(&rest[..rest.iter().position(|byte| *byte == 0)?]).ok()?,
        };
        Some(Superbox { label, whole, content: &inside[description.len()..] })
    }

    /// Iterates over the superboxes inside, to the first that is damaged.
    pub fn children(self) -> impl Iterator<Item = Superbox<'a>> {
        let mut rest = self.content;
        std::iter::from_fn(move || {
            let child = Superbox::read(rest)?;
            rest = &rest[child.whole.len()..];
            Some(child)
        })
    }
}

/// The type of the first box, and the box.
fn first(bytes: &[u8]) -> Option<([u8; 4], &[u8])> {
    let length = u32::from_be_bytes(*bytes.first_chunk()?) as usize;
    let kind = *bytes.get(4..)?.first_chunk()?;
    (length >= HEADER).then(|| bytes.get(..length)).flatten().map(|whole| (kind, whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> Vec<u8> {
        let manifest =
            |label| superbox(Kind::Manifest, label, &[cbor(Kind::Claim, "c2pa.claim.v2", &[0xa0])]);
        superbox(Kind::Store, "c2pa", &[manifest("urn:a"), manifest("urn:b")])
    }

    #[test]
    fn boxes_are_read_back() {
        let store = store();
        let read = Superbox::read(&store).unwrap();
        assert_eq!((read.label, read.whole), ("c2pa", &store[..]));
        assert_eq!(read.children().map(|child| child.label).collect::<Vec<_>>(), ["urn:a", "urn:b"]);
        let claim = read.children().next().unwrap().children().next().unwrap();
        assert_eq!(claim.label, "c2pa.claim.v2");
    }

    #[test]
    fn damaged_boxes_are_not_read_and_never_panic() {
        let whole = store();
        for cut in 0..whole.len() {
            assert!(Superbox::read(&whole[..cut]).is_none(), "cut at {cut}");
        }
        for at in 0..whole.len() {
            for value in [0, 1, 7, 8, 0x7f, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] = value;
                let children = Superbox::read(&bytes).into_iter().flat_map(Superbox::children);
                assert!(children.flat_map(Superbox::children).count() <= 2);
            }
        }
    }
}
