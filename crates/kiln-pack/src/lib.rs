//! Text files inside the program: a build script compresses them into one file, the program unpacks it when they are needed.
//!
//! ```
//! let packed = kiln_pack::pack(&[("a.txt".into(), b"first".to_vec()), ("b.txt".into(), b"second".to_vec())]);
//! let files = kiln_pack::unpack(&packed);
//! assert_eq!(files["b.txt"], b"second");
//! ```
//!
//! In a build script, [`pack_files`] writes the file that `include_bytes!(concat!(env!("OUT_DIR"), "/NAME"))` embeds.
//! Unpacked, it is a sequence of names, lengths and contents: name, zero byte, decimal length, zero byte, contents.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::Path;

/// The strongest compression. It takes a fraction of a second for the texts of this program.
const LEVEL: u8 = 10;

/// The name and the content of a file.
pub type NamedFile = (String, Vec<u8>);

/// Writes files, given as names and contents, one after another.
pub fn join<'a>(files: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Vec<u8> {
    let mut all = Vec::new();
    for (name, contents) in files {
        all.extend_from_slice(format!("{name}\0{}\0", contents.len()).as_bytes());
        all.extend_from_slice(contents);
    }
    all
}

/// Compresses files, given as names and contents.
pub fn pack(files: &[NamedFile]) -> Vec<u8> {
    let files = files.iter().map(|(name, contents)| (name.as_str(), contents.as_slice()));
    miniz_oxide::deflate::compress_to_vec(&join(files), LEVEL)
}

/// Returns the files that [`pack`] compressed; those up to the damage if there is any.
pub fn unpack(packed: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let all = miniz_oxide::inflate::decompress_to_vec(packed).unwrap_or_default();
    split(&all).into_iter().map(|(name, contents)| (name, contents.to_vec())).collect()
}

/// Compresses each file by itself, so that it can be handed on as a gzip stream: one of those that [`split`] returns.
pub fn pack_gzip(files: &[NamedFile]) -> Vec<u8> {
    let streams: Vec<Vec<u8>> = files.iter().map(|(_, contents)| gzip(contents)).collect();
    join(files.iter().zip(&streams).map(|((name, _), stream)| (name.as_str(), stream.as_slice())))
}

/// Returns the files that [`join`] wrote; those up to the damage if there is any.
pub fn split(all: &[u8]) -> BTreeMap<String, &[u8]> {
    let (mut files, mut rest) = (BTreeMap::new(), all);
    while let Some((name, contents, following)) = next_file(rest) {
        files.insert(name.to_owned(), contents);
        rest = following;
    }
    files
}

/// Header of a gzip stream: deflate, no name, no time, strongest compression, unknown system.
const GZIP_HEADER: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 2, 0xff];

fn gzip(contents: &[u8]) -> Vec<u8> {
    let mut out = GZIP_HEADER.to_vec();
    out.extend(miniz_oxide::deflate::compress_to_vec(contents, LEVEL));
    out.extend(crc32(contents).to_le_bytes());
    out.extend((contents.len() as u32).to_le_bytes());
    out
}

/// The contents of a gzip stream of [`pack_gzip`]; nothing if it is damaged.
pub fn gunzip(stream: &[u8]) -> Vec<u8> {
    let deflated = stream.get(GZIP_HEADER.len()..stream.len().saturating_sub(8)).unwrap_or_default();
    miniz_oxide::inflate::decompress_to_vec(deflated).unwrap_or_default()
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { 0xedb8_8320 ^ (crc >> 1) } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), step))
}

/// Splits the first file from the others: its name, its contents and the rest.
fn next_file(all: &[u8]) -> Option<(&str, &[u8], &[u8])> {
    let mut parts = all.splitn(3, |byte| *byte == 0);
    let (name, length, rest) = (parts.next()?, parts.next()?, parts.next()?);
    let length = std::str::from_utf8(length).ok()?.parse().ok()?;
    let (contents, following) = rest.split_at_checked(length)?;
    Some((std::str::from_utf8(name).ok()?, contents, following))
}

/// In a build script: packs these files, which are relative to the package's folder, into `to` in the script's output
/// folder. Their names are their paths without folders.
pub fn pack_files(files: &[impl AsRef<Path>], to: &str) -> std::io::Result<()> {
    write_packed(files, to, pack)
}

/// In a build script: [`pack_files`] with each file compressed by itself.
pub fn pack_files_gzip(files: &[impl AsRef<Path>], to: &str) -> std::io::Result<()> {
    write_packed(files, to, pack_gzip)
}

fn write_packed(
    files: &[impl AsRef<Path>],
    to: &str,
    pack: fn(&[NamedFile]) -> Vec<u8>,
) -> std::io::Result<()> {
    let folder = |name: &str| std::env::var_os(name).unwrap_or_default();
    let mut contents = Vec::new();
    for file in files {
        // Read at run time: the compiled script may outlive the folder it was compiled in.
        let path = Path::new(&folder("CARGO_MANIFEST_DIR")).join(file);
        println!("cargo::rerun-if-changed={}", path.display());
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        contents.push((name, std::fs::read(&path)?));
    }
    std::fs::write(Path::new(&folder("OUT_DIR")).join(to), pack(&contents))
}

/// In a build script: the files of a folder of the package, sorted, with the folder in front.
pub fn files_of(folder: &str) -> std::io::Result<Vec<String>> {
    let path = Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default()).join(folder);
    println!("cargo::rerun-if-changed={}", path.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(&path)? {
        files.push(format!("{folder}/{}", entry?.file_name().to_string_lossy()));
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gzip_stream_holds_its_file() {
        let text = "the same again, ".repeat(50).into_bytes();
        let packed = pack_gzip(&[("a".into(), text.clone()), ("empty".into(), Vec::new())]);
        let files = split(&packed);
        assert!(files["a"].len() < 100 && files["a"].starts_with(&[0x1f, 0x8b, 8]));
        assert_eq!((gunzip(files["a"]), gunzip(files["empty"])), (text, Vec::new()));
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert!(gunzip(&[]).is_empty() && split(&packed[..packed.len() - 1]).len() == 1);
    }

    #[test]
    fn files_come_back_and_damage_is_no_panic() {
        let files: Vec<(String, Vec<u8>)> = vec![
            ("empty".into(), vec![]),
            ("zeros".into(), vec![0; 5000]),
            ("text".into(), b"12\0a".to_vec()),
        ];
        let packed = pack(&files);
        assert!(packed.len() < 100);
        assert_eq!(unpack(&packed), files.into_iter().collect());
        for length in 0..packed.len() {
            unpack(&packed[..length]);
        }
        assert!(
            unpack(&miniz_oxide::deflate::compress_to_vec(b"a\x0099999999999999999999\0x", 1)).is_empty()
        );
    }
}
