//! Protocols that take a whole PNG: kitty's and iTerm2's.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Removes the images at the cursor.
pub(super) const KITTY_ERASE: &str = "\x1b_Ga=d,d=C,q=2\x1b\\";

/// Encodes for kitty's graphics protocol: base64 in chunks of at most 4096 characters.
pub(super) fn kitty(png: &[u8], columns: u32, rows: u32) -> String {
    let encoded = STANDARD.encode(png);
    let count = encoded.len().div_ceil(4096);
    let mut out = String::new();
    for i in 0..count {
        let chunk = &encoded[4096 * i..encoded.len().min(4096 * (i + 1))];
        // f=100: PNG, a=T: show at once, q=2: no answer, c and r: the cells to fill, m: whether more follows.
        let first = if i == 0 { format!("f=100,a=T,q=2,c={columns},r={rows},") } else { String::new() };
        let more = u8::from(i + 1 < count);
        out.push_str(&format!("\x1b_G{first}m={more};{chunk}\x1b\\"));
    }
    out.push('\n');
    out
}

/// Encodes for iTerm2's inline images.
pub(super) fn iterm2(png: &[u8], columns: u32, rows: u32) -> String {
    let (size, data) = (png.len(), STANDARD.encode(png));
    format!("\x1b]1337;File=inline=1;width={columns};height={rows};size={size}:{data}\x07\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_image_is_split_into_chunks_and_the_last_is_marked() {
        let out = kitty(&vec![7; 4000], 8, 4);
        let chunks: Vec<&str> = out.trim_end().split_terminator("\x1b\\").collect();
        assert_eq!(chunks.len(), 2);
        assert!(chunks[0].starts_with("\x1b_Gf=100,a=T,q=2,c=8,r=4,m=1;"));
        assert!(chunks[1].starts_with("\x1b_Gm=0;"));
        let data: String = chunks.iter().map(|c| c.split_once(';').unwrap().1).collect();
        assert_eq!(STANDARD.decode(data).unwrap(), vec![7; 4000]);
    }
}
