//! The AI mark: IPTC's properties in an XMP packet, by which programs and sites know that a model made the image.
//!
//! It names neither prompt nor date, so that equal requests give equal files.

use image::ImageFormat;

use crate::decode::sniff;
use crate::limits::MAX_TEXT;
use crate::{Error, Result, jpeg, png_chunks, webp};

/// IPTC's terms for the source of an image are addresses below this one.
const SOURCE_TERMS: &str = "http://cv.iptc.org/newscodes/digitalsourcetype/";
/// The keyword of XMP in PNG texts.
pub(crate) const PNG_KEYWORD: &str = "XML:com.adobe.xmp";
/// Start of the JPEG segment that holds XMP.
pub(crate) const JPEG_TAG: &[u8] = b"http://ns.adobe.com/xap/1.0/\0";

/// How much of an image a model made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AiSource {
    /// All of it, from words or references.
    Generated,
    /// A part, or all from another image's pixels: initial images, masks, upscaling.
    Composite,
}

impl AiSource {
    /// IPTC's address of the term.
    pub fn address(self) -> String {
        let term = match self {
            AiSource::Generated => "trainedAlgorithmicMedia",
            AiSource::Composite => "compositeWithTrainedAlgorithmicMedia",
        };
        format!("{SOURCE_TERMS}{term}")
    }
}

/// The mark of a file that is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AiMark {
    /// How much the model made.
    pub source: AiSource,
    /// Program and model, such as `Kiln, FLUX.2 klein 4B`.
    pub system: String,
    /// The version of the program.
    pub version: String,
    /// The label that China's GB 45438 asks of services: a JSON text, stored as `TC260:AIGC`.
    pub label: Option<String>,
}

impl AiMark {
    /// The XMP packet.
    pub(crate) fn packet(&self) -> String {
        let mut namespaces = String::from(
            "xmlns:xmp=\"http://ns.adobe.com/xap/1.0/\" \
             xmlns:Iptc4xmpExt=\"http://iptc.org/std/Iptc4xmpExt/2008-02-29/\"",
        );
        let tool = format!("Kiln {}", self.version);
        let source = self.source.address();
        let mut properties = vec![
            ("xmp:CreatorTool", &tool),
            ("Iptc4xmpExt:DigitalSourceType", &source),
            ("Iptc4xmpExt:AISystemUsed", &self.system),
            ("Iptc4xmpExt:AISystemVersionUsed", &self.version),
        ];
        if let Some(label) = &self.label {
            namespaces += " xmlns:TC260=\"http://www.tc260.org.cn/ns/AIGC/1.0/\"";
            properties.push(("TC260:AIGC", label));
        }
        let mut packet = format!(
            "<?xpacket begin=\"\u{feff}\" id=\"W5M0MpCehiHzreSzNTczkc9d\"?>\n<x:xmpmeta xmlns:x=\"adobe:ns:meta/\">\n\
             <rdf:RDF xmlns:rdf=\"http://www.w3.org/1999/02/22-rdf-syntax-ns#\">\n\
             <rdf:Description rdf:about=\"\" {namespaces}>\n"
        );
        for (name, value) in properties {
            packet += &format!("<{name}>{}</{name}>\n", escaped(value));
        }
        packet + "</rdf:Description>\n</rdf:RDF>\n</x:xmpmeta>\n<?xpacket end=\"r\"?>"
    }
}

/// A text inside an XML element. XML has no control characters but tabs and line ends, so those are left out.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '\t' | '\n' => out.push(character),
            '\u{fffe}' | '\u{ffff}' => {}
            _ if character.is_control() => {}
            _ => out.push(character),
        }
    }
    out
}

/// What a file's XMP says of its origin, written by Kiln or another program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundAiMark {
    /// IPTC's term, such as `trainedAlgorithmicMedia`.
    pub source: String,
    /// The program or model.
    pub system: Option<String>,
    /// Its version.
    pub version: Option<String>,
}

impl FoundAiMark {
    /// Whether the term says that a model made the image or a part of it.
    pub fn is_ai(&self) -> bool {
        matches!(
            &self.source[..],
            "trainedAlgorithmicMedia" | "compositeWithTrainedAlgorithmicMedia" | "compositeSynthetic"
        )
    }
}

/// Returns what a file says of its origin; `None` if it says nothing. The pixels are not decoded.
pub fn read_ai_mark(bytes: &[u8]) -> Result<Option<FoundAiMark>> {
    let name = "<bytes>";
    let (format, _) = sniff(name, bytes)?;
    let packet = match format {
        ImageFormat::Png => match png_chunks::text(bytes, PNG_KEYWORD, MAX_TEXT) {
            Some(None) => return Err(Error::Text { name: name.into() }),
            found => found.flatten(),
        },
        ImageFormat::Jpeg => {
            let app1 = jpeg::segments(bytes).filter(|segment| segment.marker == jpeg::APP1);
            text(app1.filter_map(|segment| segment.data.strip_prefix(JPEG_TAG)).next())
        }
        ImageFormat::WebP => text(webp::xmp(bytes)),
        _ => None,
    };
    Ok(packet.and_then(|packet| {
        let source = property(&packet, "DigitalSourceType")?;
        let source = source.rsplit('/').next().unwrap_or_default().to_owned();
        let system = property(&packet, "AISystemUsed");
        Some(FoundAiMark { source, system, version: property(&packet, "AISystemVersionUsed") })
    }))
}

fn text(packet: Option<&[u8]>) -> Option<String> {
    packet
        .filter(|packet| packet.len() <= MAX_TEXT)
        .map(|packet| String::from_utf8_lossy(packet).into_owned())
}

/// The value of an XMP property, whatever its prefix: an element, an attribute, or the resource of an empty element. XMP
/// allows little more for plain values, so that no XML parser is needed.
fn property(packet: &str, name: &str) -> Option<String> {
    packet.match_indices(name).find_map(|(at, _)| {
        if !packet[..at].ends_with(':') {
            return None;
        }
        let rest = &packet[at + name.len()..];
        let attribute = rest.trim_start().strip_prefix('=').map(str::trim_start);
        let value = match attribute {
            Some(value) => quoted(value)?,
            None => {
                let (inside, content) = rest.split_once('>')?;
                match inside.split_once("resource=") {
                    Some((_, value)) => quoted(value)?,
                    None if inside.is_empty() || inside.starts_with(char::is_whitespace) => {
                        content.split_once('<')?.0
                    }
                    None => return None,
                }
            }
        };
        let value = unescaped(value.trim());
        (!value.is_empty()).then_some(value)
    })
}

fn quoted(text: &str) -> Option<&str> {
    let quote = text.chars().next().filter(|quote| matches!(quote, '"' | '\''))?;
    Some(text[1..].split_once(quote)?.0)
}

fn unescaped(text: &str) -> String {
    let names = [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&apos;", "'"), ("&amp;", "&")];
    names.iter().fold(text.to_owned(), |text, (name, character)| text.replace(name, character))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Encoding, Format, Metadata, RgbImage, encode_with_metadata, from_bytes, read_recipe};

    fn mark() -> AiMark {
        AiMark {
            source: AiSource::Composite,
            system: "Kiln, <a & \"b\"> 🌸\u{1}".into(),
            version: "1.2.3".into(),
            label: None,
        }
    }

    #[test]
    fn every_format_keeps_the_mark_beside_the_recipe_and_the_pixels() {
        let image = RgbImage::new(3, 2, (0..18).map(|value| value * 14).collect()).unwrap();
        let mark = mark();
        for format in [Format::Png, Format::Jpeg, Format::Webp] {
            for quality in [None, Some(80)] {
                for recipe in [None, Some("{}")] {
                    let encoding = Encoding { quality, ..format.into() };
                    let file = |ai_mark| {
                        let metadata = Metadata { recipe, parameters: recipe, ai_mark };
                        encode_with_metadata(&image, encoding, &metadata).unwrap()
                    };
                    let (marked, plain) = (file(Some(&mark)), file(None));
                    let found = read_ai_mark(&marked).unwrap().unwrap();
                    assert_eq!(found.source, "compositeWithTrainedAlgorithmicMedia");
                    assert!(found.is_ai());
                    assert_eq!(found.system.as_deref(), Some("Kiln, <a & \"b\"> 🌸"));
                    assert_eq!(found.version.as_deref(), Some("1.2.3"));
                    assert_eq!(read_recipe(&marked).unwrap().as_deref(), recipe);
                    assert_eq!(from_bytes("a", &marked).unwrap(), from_bytes("a", &plain).unwrap());
                    assert_eq!(read_ai_mark(&plain).unwrap(), None);
                    assert!(marked.len() - plain.len() < 1024, "{format:?}");
                }
            }
        }
    }

    #[test]
    fn a_packet_is_well_formed_and_holds_the_label() {
        let label = r#"{"Label":"1","ContentProducer":"a<b"}"#;
        let packet = AiMark { label: Some(label.into()), ..mark() }.packet();
        assert!(packet.contains(r#"<TC260:AIGC>{"Label":"1","ContentProducer":"a&lt;b"}</TC260:AIGC>"#));
        assert!(packet.contains("xmlns:TC260="));
        assert!(!mark().packet().contains("TC260"));
    }

    #[test]
    fn marks_of_other_programs_are_read_in_every_form() {
        let term = "trainedAlgorithmicMedia";
        for packet in [
            format!("<rdf:Description Iptc4xmpExt:DigitalSourceType=\"{SOURCE_TERMS}{term}\"/>"),
            format!("<rdf:Description e:DigitalSourceType = '{SOURCE_TERMS}{term}'/>"),
            format!("<Iptc4xmpExt:DigitalSourceType rdf:resource=\"{SOURCE_TERMS}{term}\"/>"),
            format!(
                "<Iptc4xmpExt:DigitalSourceType>\n{SOURCE_TERMS}{term}\n</Iptc4xmpExt:DigitalSourceType>"
            ),
            format!(
                "<e:DigitalSourceTypeName>a</e:DigitalSourceTypeName><e:DigitalSourceType>{term}</e:DigitalSourceType>"
            ),
        ] {
            let source = property(&packet, "DigitalSourceType").unwrap();
            assert!(source.ends_with(term), "{packet}: {source}");
        }
        for packet in [
            "",
            ":DigitalSourceType",
            ":DigitalSourceType=",
            ":DigitalSourceType=\"a",
            ":DigitalSourceType>a",
        ] {
            assert_eq!(property(packet, "DigitalSourceType"), None, "{packet}");
        }
    }
}
