"Packaging, read from settings.ini: the library, and the data set as `stocker/_data`."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

settings = ConfigParser(delimiters=['='])
settings.read(Path(__file__).parent / 'settings.ini', encoding='utf-8')
config = settings['DEFAULT']


def requirements(name: str) -> list[str]:
    "The requirements of one list in settings.ini, one a word."
    return config.get(name, '').split()


extra_names = ['fast', 'data', 'llm', 'train', 'serve', 'scale', 'bench', 'dev']
extras = {name: requirements(f'{name}_requirements') for name in extra_names}
extras['all'] = sorted({requirement for name in extra_names if name != 'dev' for requirement in extras[name]})

folders = [path.name for path in sorted((Path(__file__).parent / 'data').iterdir()) if path.is_dir()]
data_packages = ['stocker._data', *(f'stocker._data.{name}' for name in folders)]

setup(
    name=config['lib_name'],
    version=config['version'],
    description=config['description'],
    long_description=Path('README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    author=config['author'],
    author_email=config['author_email'],
    url=config['git_url'],
    license='Apache-2.0',
    license_files=['LICENSE'],
    keywords=config['keywords'],
    classifiers=[
        'Development Status :: 3 - Alpha',
        f"Intended Audience :: {config['audience']}",
        f"Natural Language :: {config['language']}",
        'Programming Language :: Python :: 3',
    ],
    python_requires=f">={config['min_python']}",
    packages=[*find_packages(include=['stocker', 'stocker.*']), *data_packages],
    package_dir={'stocker._data': 'data'},
    package_data={name: ['*'] for name in data_packages},
    install_requires=requirements('requirements'),
    extras_require=extras,
    entry_points={'console_scripts': ['stocker = stocker.cli:main']},
    zip_safe=False,
)
