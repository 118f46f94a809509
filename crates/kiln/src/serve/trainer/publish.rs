//! Puts a finished LoRA where requests find it.

use std::fs;
use std::io;
use std::path::Path;

use kiln_base::TemporaryFolder;

/// Copies a LoRA into the folder of LoRAs, under its name or with a number added if that is taken; returns the name. It
/// appears whole, and never replaces a file.
pub fn publish(lora: &Path, folder: &Path, name: &str) -> io::Result<String> {
    fs::create_dir_all(folder)?;
    // Hidden: its content is not listed.
    let temporary = TemporaryFolder::create(folder)?;
    let copy = temporary.path().join("lora");
    fs::copy(lora, &copy)?;
    for number in 1.. {
        let name = if number == 1 { name.to_owned() } else { format!("{name}-{number}") };
        let path = folder.join(format!("{name}.safetensors"));
        if path.exists() {
            continue;
        }
        match fs::hard_link(&copy, &path) {
            Ok(()) => return Ok(name),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            // A file system without links.
            Err(_) => return fs::rename(&copy, &path).map(|()| name),
        }
    }
    Err(io::Error::other("no name is free"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lora_never_replaces_another() {
        let folder = tempfile::tempdir().unwrap();
        let (lora, loras) = (folder.path().join("new"), folder.path().join("loras"));
        fs::write(&lora, "new").unwrap();
        let read = |name: &str| fs::read_to_string(loras.join(name)).unwrap();
        assert_eq!(publish(&lora, &loras, "me").unwrap(), "me");
        fs::write(loras.join("me.safetensors"), "old").unwrap();
        assert_eq!(publish(&lora, &loras, "me").unwrap(), "me-2");
        assert_eq!(publish(&lora, &loras, "me").unwrap(), "me-3");
        assert_eq!((read("me.safetensors"), read("me-2.safetensors")), ("old".into(), "new".into()));
        assert_eq!(fs::read_dir(&loras).unwrap().count(), 3, "nothing else is left");
        assert!(publish(&folder.path().join("none"), &loras, "x").is_err());
    }
}
