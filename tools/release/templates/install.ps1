# Installs Kiln for one user on Windows (x86-64):
#
#     irm @REPOSITORY@/releases/latest/download/install.ps1 | iex
#     .\install.ps1 -Version 0.1.0     another version than the one this script belongs to
#     .\install.ps1 -Folder D:\kiln    elsewhere than in %LOCALAPPDATA%\Programs\kiln (KILN_PREFIX)
#     .\install.ps1 -NoPath            leaves the PATH as it is
#     .\install.ps1 -Uninstall         removes what it installed
#
# Where scripts are forbidden, as Windows has it at first: powershell -ExecutionPolicy Bypass -File install.ps1 -Uninstall
# KILN_RELEASES replaces the address of the releases, for a mirror.
param(
    [string]$Version = '@VERSION@',
    [string]$Folder = $(if ($env:KILN_PREFIX) { $env:KILN_PREFIX } else { Join-Path $env:LOCALAPPDATA 'Programs\kiln' }),
    [switch]$NoPath,
    [switch]$Uninstall
)
[Net.ServicePointManager]::SecurityProtocol = [Net.ServicePointManager]::SecurityProtocol -bor [Net.SecurityProtocolType]::Tls12

$Releases = if ($env:KILN_RELEASES) { $env:KILN_RELEASES } else { '@REPOSITORY@/releases' }
# minisign's public key; empty for a release that is not signed.
$PublicKey = '@PUBLIC_KEY@'
$Version = $Version -replace '^v'
$Folder = $ExecutionContext.SessionState.Path.GetUnresolvedProviderPathFromPSPath($Folder)
$List = Join-Path $Folder 'installed.txt'

function Get-ReleaseFile([string]$Name, [string]$To) {
    $file = Join-Path $To $Name
    $url = "$Releases/download/v$Version/$Name"
    # The file of Invoke-WebRequest is a pattern: it can't be in a folder whose name has brackets.
    try { (New-Object Net.WebClient).DownloadFile($url, $file) } catch { throw "can't download ${url}: $($_.Exception.GetBaseException().Message)" }
    return $file
}

# Checks the list of checksums with its signature, and the file with the list.
function Test-Download([string]$File, [string]$Sums) {
    if ($PublicKey -and -not (Get-Command minisign -ErrorAction SilentlyContinue)) {
        Write-Host 'minisign is not installed: the checksum is checked, the signature is not'
    } elseif ($PublicKey) {
        Get-ReleaseFile 'SHA256SUMS.minisig' (Split-Path $Sums) | Out-Null
        & minisign -Vqm $Sums -P $PublicKey
        if ($LASTEXITCODE -ne 0) { throw 'the signature of SHA256SUMS is wrong' }
    }
    $name = Split-Path -Leaf $File
    $lines = @(Get-Content -LiteralPath $Sums | Where-Object { ($_ -split '\s+\*?', 2)[1] -eq $name })
    if ($lines.Count -eq 0) { throw "SHA256SUMS does not list $name" }
    if ($lines.Count -gt 1) { throw "SHA256SUMS lists $name more than once" }
    $expected = ($lines[0] -split '\s+')[0]
    $found = (Get-FileHash -Algorithm SHA256 -LiteralPath $File).Hash.ToLowerInvariant()
    if ($found -ne $expected) { throw "$name is damaged: its sha256 is $found, expected $expected" }
}

# The entries of the user's PATH, unexpanded: %USERPROFILE% and the like stay what they are.
function Get-UserPath {
    $key = [Microsoft.Win32.Registry]::CurrentUser.OpenSubKey('Environment')
    $value = $key.GetValue('Path', '', 'DoNotExpandEnvironmentNames')
    return @($value -split ';' | Where-Object { $_ })
}

function Set-UserPath([string[]]$Entries) {
    $key = [Microsoft.Win32.Registry]::CurrentUser.OpenSubKey('Environment', $true)
    $key.SetValue('Path', ($Entries -join ';'), 'ExpandString')
    # Setting any variable this way tells running programs that the environment has changed.
    [Environment]::SetEnvironmentVariable('KILN_INSTALLED', $null, 'User')
}

# A program that runs can be renamed, and not deleted: the old file goes away at the next installation.
function Remove-Installed {
    Get-ChildItem -LiteralPath $Folder -Filter 'kiln.exe.old*' | Remove-Item -Force -ErrorAction SilentlyContinue
    foreach ($name in Get-Content -LiteralPath $List) {
        $file = Join-Path $Folder $name
        if (-not (Test-Path -LiteralPath $file)) { continue }
        try { Remove-Item -LiteralPath $file -Force } catch { Move-Item -LiteralPath $file "$file.old$PID" -Force }
    }
    Remove-Item -LiteralPath $List -Force
}

function Install-Kiln {
    if (-not [Environment]::Is64BitOperatingSystem) { throw 'Kiln needs 64-bit Windows' }
    if ($Version -notmatch '^[0-9A-Za-z.+-]+$') { throw "'$Version' is not a version" }
    $name = "kiln-$Version-x86_64-pc-windows-gnu"
    # On the drive of the folder: a full one is seen before the old version goes.
    $temporary = Join-Path $Folder ".kiln-$([Guid]::NewGuid())"
    [IO.Directory]::CreateDirectory($temporary) | Out-Null
    try {
        Write-Host "downloading $name.zip"
        $sums = Get-ReleaseFile 'SHA256SUMS' $temporary
        $archive = Get-ReleaseFile "$name.zip" $temporary
        Test-Download $archive $sums
        Add-Type -AssemblyName System.IO.Compression.FileSystem
        [IO.Compression.ZipFile]::ExtractToDirectory($archive, $temporary)
        # `Get-Item` spells a short path (LONGUS~1) out, as `Get-ChildItem` does.
        $unpacked = (Get-Item -LiteralPath (Join-Path $temporary $name)).FullName
        & (Join-Path $unpacked 'kiln.exe') --version | Out-Null
        if ($LASTEXITCODE -ne 0) { throw 'the program does not run on this machine' }
        $files = @(Get-ChildItem -LiteralPath $unpacked -Recurse -File | ForEach-Object { $_.FullName.Substring($unpacked.Length + 1) })
        if (Test-Path -LiteralPath $List) { Remove-Installed }
        $files | Set-Content -LiteralPath $List
        foreach ($file in $files) {
            $to = Join-Path $Folder $file
            [IO.Directory]::CreateDirectory([IO.Path]::GetDirectoryName($to)) | Out-Null
            Move-Item -LiteralPath (Join-Path $unpacked $file) $to -Force
        }
    } finally {
        Remove-Item -LiteralPath $temporary -Recurse -Force -ErrorAction SilentlyContinue
    }
    Write-Host "installed $(& (Join-Path $Folder 'kiln.exe') --version): $Folder\kiln.exe"
    if (-not $NoPath -and (Get-UserPath) -notcontains $Folder) {
        Set-UserPath (@(Get-UserPath) + $Folder)
        $env:Path += ";$Folder"
        Write-Host 'added its folder to your PATH; other windows see it when they are opened again'
    }
    $program = (Get-Item -LiteralPath (Join-Path $Folder 'kiln.exe')).FullName
    $first = Get-Command kiln -CommandType Application -ErrorAction SilentlyContinue | Select-Object -First 1
    if ($first -and (Get-Item -LiteralPath $first.Source).FullName -ne $program) {
        Write-Warning "``kiln`` starts $($first.Source), which comes earlier in the PATH: remove it, or put $Folder before it"
    } else {
        Write-Host 'try it: kiln generate "a red apple"'
    }
}

function Uninstall-Kiln {
    if (-not (Test-Path -LiteralPath $List)) { throw "$List is not there: this script did not install Kiln into $Folder" }
    Remove-Installed
    foreach ($left in @('man', 'completions', '')) {
        $left = Join-Path $Folder $left
        if ((Test-Path -LiteralPath $left) -and -not (Get-ChildItem -LiteralPath $left)) { Remove-Item -LiteralPath $left -ErrorAction SilentlyContinue }
    }
    if ((Get-UserPath) -contains $Folder) { Set-UserPath @(Get-UserPath | Where-Object { $_ -ne $Folder }) }
    Write-Host "removed Kiln from $Folder; models, images and settings stay in your folders"
}

# A block of its own: `iex` runs this in the user's session, whose preferences stay.
& {
    $ErrorActionPreference = 'Stop'
    if ($Uninstall) { Uninstall-Kiln } else { Install-Kiln }
}
