//! Protocols that take a whole PNG: kitty's and iTerm2's.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Encodes for kitty's graphics protocol: base64 in chunks of at most 4096 characters.
pub(super) fn kitty(png: &[u8]) -> String {
    let encoded = STANDARD.encode(png);
    let count = encoded.len().div_ceil(4096);
    let mut out = String::new();
    for i in 0..count {
        let chunk = &encoded[4096 * i..encoded.len().min(4096 * (i + 1))];
        // f=100: PNG, a=T: show at once, q=2: no answer, m: whether more follows.
        let first = if i == 0 { "f=100,a=T,q=2," } else { "" };
        let more = u8::from(i + 1 < count);
        out.push_str(&format!("\x1b_G{first}m={more};{chunk}\x1b\\"));
    }
    out.push('\n');
    out
}

/// Encodes for iTerm2's inline images.
pub(super) fn iterm2(png: &[u8]) -> String {
    format!("\x1b]1337;File=inline=1;size={}:{}\x07\n", png.len(), STANDARD.encode(png))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_image_is_split_into_chunks_and_the_last_is_marked() {
        let out = kitty(&vec![7; 4000]);
        let chunks: Vec<&str> = out.trim_end().split_terminator("\x1b\\").collect();
        assert_eq!(chunks.len(), 2);
        assert!(chunks[0].starts_with("\x1b_Gf=100,a=T,q=2,m=1;"));
        assert!(chunks[1].starts_with("\x1b_Gm=0;"));
        let data: String = chunks.iter().map(|c| c.split_once(';').unwrap().1).collect();
        assert_eq!(STANDARD.decode(data).unwrap(), vec![7; 4000]);
    }
}
