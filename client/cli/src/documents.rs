//! `sluice completion` and `sluice man`: what shells and `man` read, from the command line itself.

use std::{io, path::PathBuf};

use clap::Command;
use clap_complete::Shell;

use crate::failure::Failure;

/// The command line of `sluice completion`.
#[derive(Debug, clap::Args)]
pub(crate) struct CompletionArgs {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// The command line of `sluice man`.
#[derive(Debug, clap::Args)]
pub(crate) struct ManArgs {
    /// The folder to write them to, which is created: one page for each command
    directory: PathBuf,
}

pub(crate) fn completion(mut command: Command, args: &CompletionArgs) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "sluice", &mut script);
    Ok(io::Write::write_all(&mut io::stdout().lock(), &script)?)
}

pub(crate) fn man(command: Command, args: &ManArgs) -> Result<(), Failure> {
    let failed = |source| Failure::File { path: args.directory.clone(), source };
    std::fs::create_dir_all(&args.directory).map_err(failed)?;
    clap_mangen::generate_to(command, &args.directory).map_err(failed)
}
